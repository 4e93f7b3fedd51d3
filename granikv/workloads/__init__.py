"""What a batch looks like: who shares which prefix, and how long everything is. One file each; no tensors here."""
