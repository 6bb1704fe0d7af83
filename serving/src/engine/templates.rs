//! A version's chat templates. One that cannot be read does not keep its version from answering prompts.

use policy::chat::{self, Conversation, Templates};
use policy::image::Image;
use std::sync::Arc;

/// Why a conversation did not become a prompt.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Unrendered {
    #[error("the version's chat templates cannot be read: {0}")]
    Broken(Arc<chat::Error>),
    #[error("{0}")]
    Chat(Arc<chat::Error>),
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Rendering(Result<Arc<Templates>, Arc<chat::Error>>);

impl Rendering {
    pub fn from_image(image: &Image) -> Self {
        let read = Templates::from_image(image).map(Arc::new);
        Rendering(read.map_err(|error| {
            tracing::warn!(%error, "chat templates not read: conversations are refused");
            Arc::new(error)
        }))
    }

    pub fn render(&self, conversation: &Conversation) -> Result<String, Unrendered> {
        let templates = self.0.as_ref().map_err(|error| Unrendered::Broken(error.clone()))?;
        let rendered = templates.render(conversation);
        rendered
            .map(|rendered| rendered.text)
            .map_err(|error| Unrendered::Chat(Arc::new(error)))
    }
}
