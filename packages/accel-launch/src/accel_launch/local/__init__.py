"""Workers of this machine: started, looked after and ended together."""
