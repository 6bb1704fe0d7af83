//! How others say what an event says. Every dialect is a pure conversion into the canonical types of [`crate::event`], and
//! knows neither HTTP nor the log. A meaning that no event has is refused by the name of its field.

pub(crate) mod cloudevents;
pub(crate) mod langfuse;
