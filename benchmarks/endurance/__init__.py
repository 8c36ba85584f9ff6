"""Endurance: many steps, models, shapes, forks and threads in one process, without growth and without drift."""
