"""all-MiniLM-L6-v2 in plain JAX, quantized, and run with and without `jaxfp8.rewrite`."""
