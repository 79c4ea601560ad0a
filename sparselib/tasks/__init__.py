"""What the models are trained on: shipped text, tokenizers, windows of tokens."""
