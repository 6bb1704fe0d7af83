//! The log lines of one thread, for tests of what they must not have. Only a subscriber of the whole
//! process sees every line: one of a thread misses those that another thread was the first to log.

use std::cell::RefCell;
use std::fmt::{Debug, Write};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

thread_local! {
    static TEXT: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Collects what this thread logs, until it is dropped.
pub struct Lines(());

impl Lines {
    pub fn capture() -> Lines {
        static INSTALL: Once = Once::new();
        INSTALL.call_once(|| tracing::subscriber::set_global_default(Collector(AtomicU64::new(1))).unwrap());
        TEXT.set(Some(String::new()));
        Lines(())
    }

    pub fn text(&self) -> String {
        TEXT.with_borrow(|text| text.clone().unwrap_or_default())
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        TEXT.set(None);
    }
}

/// Of the whole process. Holds the id of the next span.
struct Collector(AtomicU64);

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{field}={value:?} ").unwrap();
    }
}

/// Adds the fields that `record` visits, if this thread captures.
fn add(record: impl FnOnce(&mut Fields<'_>)) {
    // formatting a value may log
    let Some(mut text) = TEXT.take() else { return };
    record(&mut Fields(&mut text));
    text.push('\n');
    TEXT.set(Some(text));
}

impl Subscriber for Collector {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        add(|fields| span.record(fields));
        Id::from_u64(self.0.fetch_add(1, Ordering::Relaxed))
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        add(|fields| values.record(fields));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        add(|fields| event.record(fields));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
