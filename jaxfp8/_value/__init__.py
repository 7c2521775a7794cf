"""What a number is, and what a problem is: dtypes, arrays, tiles, the spec of a scaled dot."""
