//! The listener, with workers that are requests.

use super::*;
use artifact::patch;
use artifact::tensor::TensorData;
use safetensors::Dtype;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);

/// One row of four weights.
fn version(values: [u8; 4]) -> Arc<Checkpoint> {
    let tensor = TensorData::new(Dtype::U8, vec![1, 4], values.to_vec()).unwrap();
    Arc::new(Checkpoint {
        tensors: [("a".to_owned(), tensor)].into(),
        ..Checkpoint::default()
    })
}

/// The left or the right half of it.
fn half(worker: usize) -> LocalPart {
    LocalPart {
        tensor: "a".into(),
        first: 2 * worker,
        axes: vec![(2, 1, 1)],
        at: 0,
        memory: 2,
    }
}

/// Worker `worker` of two of one replica.
async fn say(asked: &Asked, worker: usize, what: &str, body: Option<Value>) -> reqwest::Response {
    let url = format!("{}{what}?worker={worker}&replica=0&of=2", asked.url);
    let client = reqwest::Client::new();
    let request = match body {
        None => client.get(url),
        Some(body) => client.post(url).json(&body),
    };
    request.send().await.unwrap()
}

async fn hold(asked: &Asked, worker: usize, holds: &Checkpoint) {
    let sha256 = half(worker).digest(&holds.tensors["a"]).unwrap();
    let held = HeldPart {
        part: half(worker),
        sha256,
    };
    say(asked, worker, "/held", Some(json!([held]))).await;
    say(asked, worker, "/end", Some(json!({"failed": null}))).await;
}

#[tokio::test]
async fn what_each_worker_holds_is_compared_whoever_ends_first_or_fails() {
    let workers = Workers::listen(([127, 0, 0, 1], 0).into()).unwrap();
    let (right, wrong) = (version([1, 2, 3, 4]), version([1, 2, 3, 5]));
    for (holds, differs) in [
        ([&right, &right], None),
        ([&right, &wrong], Some(1)),
        ([&wrong, &wrong], Some(1)),
    ] {
        for order in [[0, 1], [1, 0]] {
            let asked = workers.ask(None, right.root(), right.clone());
            for worker in order {
                say(&asked, worker, "", None).await;
            }
            for worker in order {
                hold(&asked, worker, holds[worker]).await;
            }
            let proof = asked.proof(SOON).await.unwrap();
            assert_eq!((proof.workers, proof.compared, proof.weights), (2, 4, 4));
            let expected = differs.map(|worker| format!("a of worker {worker}"));
            assert_eq!(proof.wrong, Vec::from_iter(expected));
        }
    }
    // nothing is proved by half of the workers, nor by one that fails; what is wrong is still found
    let asked = workers.ask(None, right.root(), right.clone());
    say(&asked, 0, "", None).await;
    hold(&asked, 0, &right).await;
    assert!(asked.proof(SOON).await.unwrap_err().to_string().contains("1 of 2"));
    say(&asked, 1, "", None).await;
    assert!(
        asked
            .proof(Duration::from_millis(20))
            .await
            .unwrap_err()
            .to_string()
            .contains("too long")
    );
    say(&asked, 1, "/end", Some(json!({"failed": "no memory"}))).await;
    assert!(asked.proof(SOON).await.unwrap_err().to_string().contains("no memory"));
    say(&asked, 1, "/end", Some(json!({"failed": null}))).await;
    assert!(
        asked
            .proof(SOON)
            .await
            .unwrap_err()
            .to_string()
            .contains("says nothing")
    );
    let asked = workers.ask(None, right.root(), right.clone());
    say(&asked, 0, "", None).await;
    say(&asked, 1, "", None).await;
    hold(&asked, 1, &wrong).await;
    while asked.exchange.workers.borrow()["1"].ended.is_none() {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        asked.proof(Duration::from_millis(20)).await.unwrap().wrong,
        ["a of worker 1"]
    );
}

#[tokio::test]
async fn each_worker_gets_its_part_of_a_patch_and_all_must_be_ready() {
    let workers = Workers::listen(([127, 0, 0, 1], 0).into()).unwrap();
    let (old, new) = (version([1, 2, 3, 4]), version([1, 9, 3, 8]));
    let whole = Contents::from_bytes(&patch::between(&old, &new).unwrap().file.into()).unwrap();
    let asked = workers.ask(Some(whole), new.root(), new.clone());
    assert!(
        asked
            .staged()
            .await
            .unwrap_err()
            .to_string()
            .contains("no worker has asked")
    );
    for worker in [0, 1] {
        let versions: Value = say(&asked, worker, "", None).await.json().await.unwrap();
        assert_eq!(
            (&versions["format"], &versions["from"]),
            (&json!(FORMAT), &json!(old.root().to_string()))
        );
        assert_eq!(
            (&versions["changed"], &versions["tensors"]),
            (
                &json!(["a"]),
                &json!({"a": ["U8", [1, 4], new.tensors["a"].bytes.digest()]})
            )
        );
        let all = say(&asked, worker, "/weights", None).await;
        assert_eq!(all.bytes().await.unwrap(), [1, 9, 3, 8].as_slice());
        let own = say(&asked, worker, "/patch", Some(json!([half(worker)]))).await;
        let own = Contents::from_bytes(&own.bytes().await.unwrap()).unwrap();
        assert_eq!(own.tensors["0"].indices().collect::<Vec<_>>(), [1]);
        say(&asked, worker, "/end", Some(json!({"failed": null}))).await;
    }
    asked.staged().await.unwrap();
    say(&asked, 1, "/end", Some(json!({"failed": "another version"}))).await;
    assert!(
        asked
            .staged()
            .await
            .unwrap_err()
            .to_string()
            .contains("another version")
    );
    for worker in [0, 1] {
        say(&asked, worker, "/patch", Some(json!([]))).await;
        say(&asked, worker, "/end", Some(json!({"failed": null}))).await;
    }
    assert!(asked.staged().await.unwrap_err().to_string().contains("copies \"a\""));
    let url = asked.url.clone();
    drop(asked);
    let gone = reqwest::Client::new()
        .post(format!("{url}/held?worker=0&replica=0&of=2"))
        .body("[")
        .send()
        .await;
    assert_eq!(gone.unwrap().status(), 404);
}
