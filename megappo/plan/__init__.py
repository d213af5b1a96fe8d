"""What a configuration will take and cost, before it runs: memory, transfers, time; and the layouts it could have."""
