"""One primitive a file, with its rules; and how each is lowered."""
