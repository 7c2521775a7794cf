"""Numbers and problems: dtypes, arrays, tiles, the spec of a scaled dot."""
