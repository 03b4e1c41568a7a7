"""What strategies ask of a model and its optimizer: parameters, shards, gradients, steps."""
