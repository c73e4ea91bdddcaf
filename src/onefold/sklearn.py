"""The scikit-learn detector under its public name, `onefold.sklearn.OnefoldDetector`."""

from onefold.integrations.sklearn import OnefoldDetector

__all__ = ["OnefoldDetector"]
