"""Plans as pictures and documents: terminal, SVG, HTML, JSON."""
