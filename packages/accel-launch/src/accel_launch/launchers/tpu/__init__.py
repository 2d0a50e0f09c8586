"""TPUs: processes on one host through torch_xla, and pods through gcloud."""
