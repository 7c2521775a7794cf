"""The decoder of Llama, Mistral and Qwen, served from the 8-bit checkpoints that people publish."""
