"""Verbs with a main. Which cells to run is yaml under conf/."""
