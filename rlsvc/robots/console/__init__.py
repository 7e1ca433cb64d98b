"""The console: a web page from which people watch a robot, take it over, and say how an episode went."""
