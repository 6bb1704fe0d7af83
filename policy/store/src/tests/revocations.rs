//! What somebody who writes to the store, but has no key that counts, can do with revocations and
//! lists: nothing that grows.

use super::*;
use crate::Revocation;
use artifact::sign::Role;
use std::collections::BTreeSet;

/// The keys of a folder: a root key, a trainer's and a release key.
struct Folder {
    root: SigningKey,
    trainer: SigningKey,
    release: SigningKey,
}

impl Folder {
    fn new() -> Self {
        let key = |seed: u8| SigningKey::from_seed(&[seed; 32]);
        Folder {
            root: key(11),
            trainer: key(12),
            release: key(13),
        }
    }

    fn keys(&self) -> TrustedKeys {
        let mut keys = TrustedKeys::default();
        keys.insert(&self.root, Role::Root);
        keys.insert(&self.trainer, Role::Trainer);
        keys.insert(&self.release, Role::Release);
        keys
    }
}

fn revocation(key: &str) -> Revocation {
    Revocation {
        policy: POLICY.into(),
        key: key.into(),
        reason: "stolen".into(),
        created_at: time::OffsetDateTime::now_utc(),
    }
}

#[tokio::test]
async fn only_revocations_of_the_folders_keys_by_keys_that_may_revoke_are_remembered() {
    let (f, folder) = (fixture(), Folder::new());
    let keys = folder.keys();
    let stranger = SigningKey::from_seed(&[9; 32]);
    // A stranger's, the stolen trainer key's, and the root key's revocations of other keys.
    for n in 0..50u8 {
        let id = Digest::of(&[n]).to_string();
        let signer = [&stranger, &folder.trainer, &folder.root][usize::from(n) % 3];
        f.store.revoke(&revocation(&id), signer, &keys).await.unwrap();
    }
    // In the place of a key of the folder, but by keys that may not revoke it.
    let release = revocation(folder.release.key_id());
    f.store.revoke(&release, &stranger, &keys).await.unwrap();
    assert!(f.store.revocations(POLICY, &keys).await.unwrap().is_empty());
    f.store.revoke(&release, &folder.trainer, &keys).await.unwrap();
    assert!(f.store.revocations(POLICY, &keys).await.unwrap().is_empty());
    // One that counts takes the place.
    assert!(f.store.revoke(&release, &folder.root, &keys).await.unwrap());
    let found = f.store.revocations(POLICY, &keys).await.unwrap();
    let by_root = BTreeSet::from([folder.root.key_id().to_owned()]);
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [(release.key, by_root)]);
}

#[tokio::test]
async fn a_root_key_signs_all_revocations_that_count_again_also_of_unknown_keys() {
    let (f, folder) = (fixture(), Folder::new());
    let keys = folder.keys();
    let [counts, does_not] = [b"counts", b"doesnt"].map(|name| Digest::of(name).to_string());
    f.store.revoke(&revocation(&counts), &folder.root, &keys).await.unwrap();
    f.store
        .revoke(&revocation(&does_not), &folder.trainer, &keys)
        .await
        .unwrap();
    f.store
        .revoke(&revocation(folder.trainer.key_id()), &folder.trainer, &keys)
        .await
        .unwrap();
    let spare = SigningKey::from_seed(&[14; 32]);
    assert_eq!(f.store.sign_revocations(POLICY, &keys, &spare).await.unwrap(), 2);
    assert_eq!(f.store.sign_revocations(POLICY, &keys, &spare).await.unwrap(), 0);
    let mut only_spare = TrustedKeys::default();
    only_spare.insert(&spare, Role::Root);
    only_spare.insert(&folder.trainer, Role::Trainer);
    let now = f.store.trusted(POLICY, only_spare).await.unwrap();
    assert!(now.is_revoked(folder.trainer.key_id()));
}

#[tokio::test]
async fn junk_in_an_envelope_does_not_keep_a_document_from_being_signed_again() {
    let (f, folder) = (fixture(), Folder::new());
    let mut assignment = sample_assignment();
    assignment.epoch = 1;
    f.store.put_assignment(&assignment, &folder.release).await.unwrap();
    let next = SigningKey::from_seed(&[15; 32]);
    let mut keys = folder.keys();
    keys.insert(&next, Role::Release);
    // A store writer who knows the next key's public half adds a signature of zeros under its id.
    let place = f.path(&format!("policy/{POLICY}/assignment/0000000001.json"));
    let mut envelope: serde_json::Value = serde_json::from_slice(&std::fs::read(&place).unwrap()).unwrap();
    let zeros = format!("{}==", "A".repeat(86));
    let junk = serde_json::json!({"keyid": next.key_id(), "sig": zeros});
    envelope["signatures"].as_array_mut().unwrap().push(junk);
    std::fs::write(&place, envelope.to_string()).unwrap();
    assert_eq!(f.store.resign(POLICY, &keys, &next).await.unwrap(), 1);
    keys.revoke(folder.release.key_id());
    f.store.get_assignment(POLICY, 1, &keys).await.unwrap();
}

#[tokio::test]
async fn a_list_that_is_too_long_is_an_error_and_odd_names_are_not_numbers() {
    let f = fixture();
    let folder = f.path(&format!("policy/{POLICY}/assignment"));
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["0000000003", "3", "00000000004", "+000000005", "0000000000", "x"] {
        std::fs::write(folder.join(format!("{name}.json")), "{}").unwrap();
    }
    let names = async |count_max| f.store.list_names(POLICY, "assignment", count_max).await;
    assert_eq!(names(6).await.unwrap().len(), 6);
    let error = names(5).await.unwrap_err();
    assert!(
        matches!(&error, Error::Listing { count_max: 5, .. }),
        "{error}: the caller does not hold all names"
    );
    // Another spelling is another place: epoch 3 is taken, 4 and 5 are free.
    assert_eq!(f.store.list_numbers(POLICY, "assignment").await.unwrap(), [3]);
    let last = f.store.last_assignment_epoch(POLICY, 1..=9).await.unwrap();
    assert_eq!(last, Some(3));
}
