"""The scikit-learn detector under its short name."""

from onefold.integrations.sklearn import OnefoldDetector

__all__ = ["OnefoldDetector"]
