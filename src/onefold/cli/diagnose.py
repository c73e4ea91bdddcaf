"""`onefold diagnose`: check a detector, and describe what its file holds of the training data."""

from onefold.cli.files import load_detector, with_progress
from onefold.cli.jobs import Diagnose
from onefold.core.batches import batch_length, batch_tensors
from onefold.core.runtime import human, trim_memory
from onefold.detectors.base import Detector
from onefold.detectors.diagnosis import Diagnosis, Finding
from onefold.errors import renamed_argument
from onefold.inputs import open_source


@trim_memory()
def run(job: Diagnose) -> int:
    """Print the diagnosis; return 1 if a check fails."""
    detector = load_detector(job.detector, job.model)
    if job.data is None:
        diagnosis = detector.diagnose(show=False)
    else:
        with renamed_argument("x", job.data):
            source = open_source(job.data, form=detector.reader.form, name=job.data)
            diagnosis = detector.diagnose(with_progress(source, "scoring"), show=False)
    diagnosis = Diagnosis((*diagnosis, describe_contents(detector)))
    print(diagnosis)
    return 0 if diagnosis.ok else 1


def describe_contents(detector: Detector, *, samples: bool = True) -> Finding:
    """Return what the file of a detector holds of the training data if it is saved with these `samples`."""
    stored = detector.state.stored_samples if samples else []
    count, size = sum(map(batch_length, stored)), sum(t.nbytes for batch in stored for t in batch_tensors(batch))
    details = f" ({human(size)}; --no-samples leaves them out)" if stored else ""
    if detector.state.stored_features:
        details += f", and the features of {detector.state.stored_features:,} training samples"
    amount = f"{count:,}" if stored else "no"
    return Finding("samples", count, None, f"the file holds {amount} raw training samples{details}")
