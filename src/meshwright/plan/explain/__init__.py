"""Why this layout, why not another, and what would have to change."""
