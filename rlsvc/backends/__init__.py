"""What other libraries' learners and policies need to run here: the only place that imports Torch models."""
