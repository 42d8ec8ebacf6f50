"""Plans for people: terminal, SVG, HTML, JSON."""
