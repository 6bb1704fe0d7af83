//! Who has worlds: this machine, or somebody else behind HTTP. What needs a world asks a [`Provider`] and
//! does not know which.

use async_trait::async_trait;

use crate::{Command, Output};

/// Makes worlds.
#[async_trait]
pub trait Provider: Send + Sync {
    /// A new world, which answers. All worlds of a provider begin in the same state.
    async fn create(&self) -> Result<Box<dyn World>, Error>;
}

/// One world. Programs that run in it find what earlier ones left. It ends when it is dropped, or for a
/// remote one at its time to live.
#[async_trait]
pub trait World: Send + Sync {
    /// Runs a program to its end. A future that is dropped before its end may cost the world.
    async fn run(&mut self, command: &Command) -> Result<Output, Error>;

    /// Ends the world and all that runs in it.
    async fn destroy(self: Box<Self>) -> Result<(), Error>;
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There are as many worlds as there may be.
    #[error("{0}")]
    Full(String),
    /// The world does not run this command, and is as it was.
    #[error("the world refused the command: {0}")]
    Refused(String),
    /// The world is gone, with what was in it. Another one can be created.
    #[error("the world is lost: {0}; create another one")]
    Lost(String),
    /// No world can be made here.
    #[error("{0}")]
    Unusable(String),
}
