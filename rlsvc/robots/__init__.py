"""Physical robots: drivers, the guard between every action and the hardware, people, virtual hardware for tests."""
