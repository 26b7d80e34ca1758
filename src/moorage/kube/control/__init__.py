"""What every controller is made of: work queue, leader election, events, probes."""
