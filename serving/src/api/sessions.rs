//! The last turn of each session that this replica answered, so that the next one is logged as what it adds to it. A memory and no
//! more: a turn whose parent is forgotten, or was answered by another replica, is logged whole.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ingest::event::{Generation, Prefix};
use ingest::payload;
use uuid::Uuid;

/// Tokens remembered, of all sessions together: 32 MiB.
const TOKENS_MAX: usize = 8 * 1024 * 1024;

/// Tenant and episode.
type Key = (String, Uuid);

/// A generation that the next turn of its session may go on from.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Parent {
    id: Uuid,
    turn: u32,
    /// Its prompt and what it sampled.
    tokens: Arc<[u32]>,
}

#[derive(Debug, Default)]
pub struct Sessions {
    memory: Mutex<Memory>,
}

#[derive(Debug, Default)]
struct Memory {
    parents: HashMap<Key, (u64, Parent)>,
    /// Keys by when they were last used.
    order: BTreeMap<u64, Key>,
    used: u64,
    tokens: usize,
}

impl Sessions {
    /// What this session's last turn was.
    pub(super) fn parent(&self, tenant: &str, episode: Uuid) -> Option<Parent> {
        let memory = self.memory();
        let found = memory.parents.get(&(tenant.to_owned(), episode))?;
        Some(found.1.clone())
    }

    /// Remembers a turn that is in the log. Sessions that have been still the longest make room.
    pub(super) fn remember(&self, tenant: &str, generation: &Generation, prompt: &[u32]) {
        let key = (tenant.to_owned(), generation.episode_id);
        let tokens: Arc<[u32]> = prompt.iter().chain(&generation.token_ids).copied().collect();
        if tokens.len() > TOKENS_MAX {
            return;
        }
        let mut memory = self.memory();
        memory.forget(&key);
        while memory.tokens + tokens.len() > TOKENS_MAX {
            let Some(oldest) = memory.order.values().next().cloned() else {
                break;
            };
            memory.forget(&oldest);
        }
        memory.used += 1;
        let used = memory.used;
        memory.tokens += tokens.len();
        memory.order.insert(used, key.clone());
        let parent = Parent {
            id: generation.id,
            turn: generation.turn,
            tokens,
        };
        memory.parents.insert(key, (used, parent));
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    fn forget(&mut self, key: &Key) {
        if let Some((used, parent)) = self.parents.remove(key) {
            self.order.remove(&used);
            self.tokens -= parent.tokens.len();
        }
    }
}

impl Parent {
    /// Takes what `generation` shares with this turn out of its prompt, if that is at least `tokens_min` tokens. Fewer cost a reader
    /// more than they save.
    pub(super) fn share(&self, generation: &mut Generation, tokens_min: usize) {
        let pairs = self.tokens.iter().zip(&generation.prompt_ids);
        let shared = pairs.take_while(|(mine, its)| mine == its).count();
        let Ok(length) = u32::try_from(shared) else { return };
        if shared < tokens_min.max(1) {
            return;
        }
        let rest = generation.prompt_ids.split_off(shared);
        let hash = blake3::hash(&payload::token_bytes(&generation.prompt_ids));
        generation.prompt_ids = rest;
        generation.prompt_prefix = Some(Prefix {
            length,
            hash: *hash.as_bytes(),
        });
        generation.parent_id = Some(self.id);
        generation.turn = self.turn.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent(tokens: &[u32]) -> Parent {
        Parent {
            id: Uuid::from_u128(7),
            turn: 3,
            tokens: tokens.into(),
        }
    }

    #[test]
    fn only_what_follows_the_shared_tokens_is_left() {
        let mut generation = crate::api::tests::generation(vec![1, 2, 3, 9, 9]);
        parent(&[1, 2, 3, 4]).share(&mut generation, 4);
        assert_eq!(
            (generation.parent_id, generation.prompt_ids.len()),
            (None, 5),
            "three are too few"
        );
        parent(&[1, 2, 3, 4]).share(&mut generation, 3);
        assert_eq!(generation.prompt_ids, [9, 9]);
        assert_eq!((generation.parent_id, generation.turn), (Some(Uuid::from_u128(7)), 4));
        let prefix = generation.prompt_prefix.unwrap();
        assert_eq!(prefix.length, 3);
        assert_eq!(prefix.hash, *blake3::hash(&payload::token_bytes(&[1, 2, 3])).as_bytes());
    }

    #[test]
    fn the_session_that_was_still_the_longest_makes_room() {
        let sessions = Sessions::default();
        let half = vec![5; TOKENS_MAX / 2];
        let mut turns = Vec::new();
        for _ in 0..3 {
            let mut generation = crate::api::tests::generation(Vec::new());
            generation.token_ids.clear();
            sessions.remember("a", &generation, &half);
            turns.push(generation);
        }
        let known = |turn: &Generation| sessions.parent("a", turn.episode_id).is_some();
        assert_eq!(turns.iter().map(known).collect::<Vec<_>>(), [false, true, true]);
        assert_eq!(sessions.parent("b", turns[2].episode_id), None, "another tenant's");
    }
}
