"""A session: states, matches, steps, history, measurement, verification. No browser is needed."""
