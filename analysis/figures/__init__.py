"""One file a figure. Each has draw(run, directory), which returns what it wrote, or nothing where it does not apply."""
