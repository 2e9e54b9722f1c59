"""Files shipped with the package: the built-in tokenizer and the local configuration."""
