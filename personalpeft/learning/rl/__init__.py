"""Reinforcement learning of a skill: tasks, rollouts, advantages and training steps."""
