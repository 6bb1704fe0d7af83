# Arms change under load: seconds until they are in force, failed requests, chi-squares. USERS=3000
need stack
SPRINGTIDE_ARMS_USERS=${USERS:-3000} it serving arms::
