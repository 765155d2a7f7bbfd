"""Figures and controls for notebooks. Nothing is computed here: data come as arguments, a Figure goes back."""
