"""A small GPT in Flax linen, trained in bfloat16 and in FP8 on the sources of Python itself."""
