"""How layers hold their operands in 8 bits, and the products of training."""
