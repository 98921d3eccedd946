"""Wake-ups: Celery tells a lane's workers that there is work; a lost or doubled one does no harm."""
