# Any order of the same events gives the same rows. STORIES=100000
need stack
SPRINGTIDE_ORDER_STORIES=${STORIES:-100000} it log any_order
