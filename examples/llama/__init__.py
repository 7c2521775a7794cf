"""The decoder of Llama, Mistral, Qwen and some mixtures of experts, from 8-bit checkpoints."""
