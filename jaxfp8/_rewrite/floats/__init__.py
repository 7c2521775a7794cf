"""`quantize_dots`: a float program with its dots in 8 bits."""
