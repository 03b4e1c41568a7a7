"""Codecs that adapt to the gradients: ALQ and AMQ with the search for their levels, and Fitted with its choices."""
