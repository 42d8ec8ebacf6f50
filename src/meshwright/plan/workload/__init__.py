"""What a step consists of, apart from any machine: operators, FLOPs, formats, layouts, schedules."""
