"""The meaning of each operation, in jax.numpy: default lowering, oracle and basis of gradients."""
