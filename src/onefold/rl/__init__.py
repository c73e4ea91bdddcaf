"""Exploration: agents that find a far goal with no other reward, and the parts that they are made of."""
