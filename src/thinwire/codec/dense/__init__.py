"""Dense codecs: every element is sent, in full precision, in fewer bits, or as a low-rank approximation."""
