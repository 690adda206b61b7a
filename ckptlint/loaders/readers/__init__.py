"""From files to rows: one module for each format."""
