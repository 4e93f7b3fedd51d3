"""A whole decode step: a decoder with random weights whose attention is any layout x kernel cell."""
