"""What became of every dot, as rows, text, JSON and a page."""
