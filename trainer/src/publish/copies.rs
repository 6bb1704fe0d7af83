//! The quantised copies of what is published: their roots go into the manifest, the copies stay in memory alone, for the version
//! that comes next touches few of their blocks.

use std::sync::{Arc, Mutex, PoisonError};

use policy::digest::Digest;
use policy::image::Image;
use policy::kernel::Threads;
use policy::manifest::Quantised;
use policy::quant::{self, Spec};

/// Versions whose copies are kept: the heads of the realtime line and of one run beside it. Others are quantised anew.
const HELD_MAX: usize = 2;

/// Which copies every version has, and those of the latest ones. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Copies {
    specs: Arc<[Spec]>,
    /// The newest last.
    held: Arc<Mutex<Vec<Held>>>,
}

#[derive(Debug)]
struct Held {
    /// Of the version.
    root: Digest,
    copies: Vec<OneCopy>,
}

/// A copy of a version, in the order of the specs.
#[derive(Debug, Clone)]
struct OneCopy {
    image: Arc<Image>,
    root: Digest,
}

/// The copies of a version that is not published yet.
#[derive(Debug, Default)]
pub(super) struct Made {
    copies: Vec<OneCopy>,
    pub quantised: Vec<Quantised>,
}

impl Copies {
    /// One copy of every version for each of `specs`.
    pub fn new(specs: &[Spec]) -> Self {
        Copies {
            specs: specs.into(),
            held: Arc::default(),
        }
    }

    /// The copies of `image`, out of those of its parent where they are held.
    pub(super) async fn make(
        &self,
        parent: Option<(Digest, Arc<Image>)>,
        image: Arc<Image>,
    ) -> Result<Made, super::Error> {
        if self.specs.is_empty() {
            return Ok(Made::default());
        }
        let specs = Arc::clone(&self.specs);
        let from = parent.and_then(|(root, image)| Some((self.copies_of(root)?, image)));
        let copies = tokio::task::spawn_blocking(move || {
            let one =
                |(i, &spec): (usize, &Spec)| make(spec, from.as_ref().map(|(held, image)| (&held[i], image)), &image);
            specs.iter().enumerate().map(one).collect::<Result<Vec<_>, _>>()
        });
        let copies = copies.await??;
        let named = self.specs.iter().zip(&copies).map(|(spec, copy)| Quantised {
            spec: spec.name().into(),
            root: copy.root,
        });
        Ok(Made {
            quantised: named.collect(),
            copies,
        })
    }

    /// Remembers the copies of the version with `root`.
    pub(super) fn keep(&self, root: Digest, made: Made) {
        if made.copies.is_empty() {
            return;
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|held| held.root != root);
        let surplus = (held.len() + 1).saturating_sub(HELD_MAX);
        held.drain(..surplus);
        held.push(Held {
            root,
            copies: made.copies,
        });
    }

    fn copies_of(&self, root: Digest) -> Option<Vec<OneCopy>> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.iter()
            .find(|held| held.root == root)
            .map(|held| held.copies.clone())
    }
}

fn make(spec: Spec, from: Option<(&OneCopy, &Arc<Image>)>, image: &Image) -> Result<OneCopy, quant::Error> {
    let threads = Threads::ONE;
    let image = match from {
        Some((copy, parent)) => {
            let (image, touched) = quant::requantise(&copy.image, parent, image, spec, &threads)?;
            tracing::debug!(%spec, ?touched, "quantised what the step changed");
            image
        }
        None => quant::quantise(image, spec, &threads)?,
    };
    Ok(OneCopy {
        root: quant::root(&image, &threads),
        image: Arc::new(image),
    })
}
