"""Engines: the ways to train a cohort. All give what training one client after another gives; they differ in speed."""
