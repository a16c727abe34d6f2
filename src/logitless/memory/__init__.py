"""Where memory goes: arithmetic for a run that has not started."""
