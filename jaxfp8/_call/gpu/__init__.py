"""The form in which GPUs compute a product."""
