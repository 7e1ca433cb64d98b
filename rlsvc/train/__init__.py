"""Training runs: orchestrator, learner group, rollout workers, evaluation."""
