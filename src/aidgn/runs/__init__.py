"""Runs on disk: their options and identity, the files of their folders, their records."""
