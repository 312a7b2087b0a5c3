"""The names of the files in the folder of a run. Other packages use the paths of `RunFolder`."""

METADATA = "run.json"
RECORDS = "results.jsonl"
STATE = "state.pt"
MODEL = "model.safetensors"
LAST = "last.safetensors"
BACKBONE = "backbone.safetensors"
BACKBONES = ".backbones"  # a folder among the runs
NOVELTY = "novelty.json"
LOG = "log.txt"
FEATURES = "features.npz"
ADAPTATION = "adaptation.jsonl"
DIAGNOSIS = "diagnosis.json"
